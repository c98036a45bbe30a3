"""What this machine can do at most: bytes read and operations done a second."""
