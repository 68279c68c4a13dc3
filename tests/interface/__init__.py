"""The public interface: what it is now, what is recorded of it, and what a change would break."""
