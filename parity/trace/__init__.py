"""Watch a module during a pass, from outside: its calls, whose code runs, and what it leaves behind."""
