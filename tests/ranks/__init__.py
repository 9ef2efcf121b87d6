"""Real process groups: gloo ranks in processes of their own, and what they are held against."""
