"""The ops: what each has to compile, for which device, and how ready it is here."""
