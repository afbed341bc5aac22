"""The bug gallery: small programs with one real mistake each, the verdict that they must get, and their legal look-alikes."""
