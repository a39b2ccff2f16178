"""The pages of held locks."""
