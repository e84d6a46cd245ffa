-- Keys of three numbers, and until when the key holds them: 32 bytes. They are little-endian doubles: to read and write them as text
-- costs more than the decision. A value that cannot be a state counts for nothing.

-- Writes to a key that matters `til` then. A late enough expiry is kept, since setting it costs as much as the rest. Now and then the
-- key is asked for it: it may be lost.
local function write(key, a, b, c, expires, til)
  if til <= expires and expires <= til + SLACK and (now % CHANCE > 0 or call('PTTL', key) ~= -1) then
    call('SETRANGE', key, '0', pack('<dddd', a, b, c, expires))
  else
    expires = til + SLACK - (til + SLACK) % 1000
    call('SET', key, pack('<dddd', a, b, c, expires), 'PXAT', expiry(til))
  end
end
