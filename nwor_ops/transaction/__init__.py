"""The transaction: begin a window, write, then commit or cancel it; and what is counted."""
