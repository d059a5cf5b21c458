"""A stand-in for a Trainium device: device type ``neuron`` on the CPU, with the limits of the real one."""
