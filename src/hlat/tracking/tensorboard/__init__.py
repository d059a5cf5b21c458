"""TensorBoard's event files: tags of the metrics, and a writer that needs neither TensorBoard nor protobuf."""

from hlat.tracking.tensorboard.writer import TensorBoard, scalars

__all__ = ["TensorBoard", "scalars"]
