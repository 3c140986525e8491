"""Ways of routing, and of reading from each other, on the same requests in virtual time: without bytes, servers and
processes.
"""
