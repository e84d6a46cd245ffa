"""Posts 5 MB and prints the status, or the error."""

import http.client
import sys
from urllib.parse import urlsplit

connection = http.client.HTTPConnection(urlsplit(sys.argv[1]).netloc)
try:
    connection.request("POST", "/", body=b"x" * 5_000_000)
    print(connection.getresponse().status)
except OSError as error:
    print(type(error).__name__)
