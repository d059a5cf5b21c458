"""Memory of a rank within a step beyond its state: activations, gradients, temporary tensors and buffers."""
