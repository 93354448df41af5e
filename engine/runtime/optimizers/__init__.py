"""The optimizers and schedules of torch and of the user, as pure rules: state is lent to them, and taken back."""
