"""What two processes must agree on: requests, hashes, layouts, block life, events, errors.

This package owns values and rules. It promises to import nothing but the standard library and hashing codecs,
and never to open a file, a socket or a tensor.
"""
