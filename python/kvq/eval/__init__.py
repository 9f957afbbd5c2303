"""Quality of a compiled model: what each cache scheme costs, measured through the library that is served."""
