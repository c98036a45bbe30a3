"""Host kernels in C++: built when the package is installed, where there is a compiler.

Everything is float32 between operations; quantised weights meet inputs rounded to 16 bits a row, with exact integer
products. A row's bits depend on its own tokens and KV only: not on other rows, chunks, threads or instruction set.
"""
