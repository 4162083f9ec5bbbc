"""Reward functions that the spawned child can import; light on purpose."""


def lengths(completions, **_):
    return [float(len(completion[0]["content"])) for completion in completions]


def constant(completions, **_):
    return [1.0] * len(completions)


def raises(completions, **_):
    raise ZeroDivisionError("the reward's own mistake")


def one_too_few(completions, **_):
    return [1.0] * (len(completions) - 1)


def infinite(completions, **_):
    return [float("inf")] * len(completions)
