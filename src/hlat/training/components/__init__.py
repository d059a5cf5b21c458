"""Training components: the protocol of what takes part in each step, and the components that the recipe asks for."""
