"""A stage of a pipeline, and the messages that it sends."""
