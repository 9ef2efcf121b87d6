"""Public problem reports S01 to S45 as tests, each named after its number (test_s07_...)."""
