"""What people see of locks: lists, the admin, the commands, the doctor, the system checks."""
