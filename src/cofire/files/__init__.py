"""Files that are whole or not there, and tables that are checked key by key."""
