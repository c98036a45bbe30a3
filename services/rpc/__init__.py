"""The control protocol: generated stubs, codecs between core values and messages, errors and
versions.
"""
