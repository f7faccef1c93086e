"""What logs and replays say: tables, plots, and two runs side by side.

Everything is read into a temporary database on disk and asked from there in SQL, so that memory
stays bounded however long the log is. Only ``words`` knows what a line looks like.
"""
