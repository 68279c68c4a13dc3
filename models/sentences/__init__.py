"""The build of the sentence-embedding model of `triton_repo/` from its published weights."""
