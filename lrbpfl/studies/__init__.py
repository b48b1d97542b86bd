"""Many runs together: comparisons, searches over fields, the paper's items, and what things cost."""
