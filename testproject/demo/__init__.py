"""What ``manage.py demo`` shows: a stampede, a line in front of a lock, and a site at work."""
