"""The tests of third-party packages that use Django's cache, on django-redis and on our backend."""
