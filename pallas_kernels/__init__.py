"""One op a folder, in the contract's order of sums; importing it sets XLA's flags, so import it before JAX computes."""

from pallas_kernels import environment

environment.setup()
