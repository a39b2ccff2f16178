"""The cache's methods that compute: Django's arguments in front, the rule of flights behind."""
