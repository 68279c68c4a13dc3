"""One program for each client, which runs in the environment of its client and imports no other tests."""
