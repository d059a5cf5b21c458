"""The schedule of the Transformer (Vaswani et al. 2017), after a warm-up of its own."""


def inverse_sqrt(config, horizon, step, *, timescale=100.0):
    """Return the share of the peak learning rate."""
    return (timescale / max(timescale, step)) ** 0.5
