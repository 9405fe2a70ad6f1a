"""What a user can cause: bad input, said plainly. The program prints it and exits with 2."""


class KairoxError(ValueError):
    """Bad input. The message says what was got, what is allowed and what to do."""
