"""The test command of cosmic-ray: asks the warm Python for the tests of the tree as it is. In: a
socket's path. Out: the exit code. Loads nothing, for it runs once a mutant."""

import socket
import sys

with socket.socket(socket.AF_UNIX) as client:
    client.connect(sys.argv[1])
    answer = client.recv(1)
sys.exit(answer[0] if answer else 1)
