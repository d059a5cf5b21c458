"""TensorBoard's event files: tags of the metrics, and a writer that needs neither TensorBoard nor protobuf."""
