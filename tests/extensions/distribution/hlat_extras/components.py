"""A component with state of the weights' shape."""

from hlat.checkpoint import ExtraState
from hlat.training.components import TrainingComponent


class Largest(TrainingComponent):
    """Keep the largest absolute value that each weight has had."""

    def __init__(self, options, parameters):
        self._parameters = parameters
        self._largest = [each.tensor.new_zeros(each.tensor.shape) for each in parameters]

    def after_step(self, end):
        for largest, each in zip(self._largest, self._parameters, strict=True):
            largest.copy_(largest.maximum(each.tensor.abs()))

    def state(self):
        return [ExtraState("largest", self._largest)]

    def reset(self):
        for largest in self._largest:
            largest.zero_()
