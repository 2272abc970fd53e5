"""Which blocks of keys each block of queries should attend to."""
