"""Two servers, the same requests in turn, times by the client's own clock."""
