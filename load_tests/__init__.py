"""Load tests of a running DDTree Serve, with Locust: `python -m load_tests --help`, docs/load-testing.md.

Locust patches the standard library for gevent when it is imported. Only `users`, `drive` and `locustfile` import it;
all other modules are plain and can be used, and tested, without.

What this package does not do: touch a server that is not on a loopback address.
"""
