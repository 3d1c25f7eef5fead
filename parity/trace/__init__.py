"""Watch what a module does in a pass, from outside: its calls, whose code they are, and what it leaves behind."""
