"""`make gpu-check`: the triton kernels on a real card, where there is one."""
