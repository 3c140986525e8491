"""Questions of callers → answers, of what each may know."""
