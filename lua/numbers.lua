-- Keys of three numbers, and until when the key holds them. They are little-endian doubles: to read and write them as text costs more
-- than the decision.

-- Returns what a key holds, or zeros where it holds anything else.
local function fetch(key)
  local value = call('GET', key)
  if value and #value == 32 then
    local a, b, c, expires = unpack_numbers('<dddd', value)
    if a >= 0 and a < EXACT and b >= 0 and b < EXACT and c >= 0 and c < EXACT then
      return a, b, c, expires
    end
  end
  return 0, 0, 0, 0
end

-- Writes to a key that matters `til` then. A late enough expiry is kept, since setting it costs as much as the rest.
local function write(key, a, b, c, expires, til)
  if til <= expires and expires <= til + SLACK then
    call('SETRANGE', key, '0', pack('<dddd', a, b, c, expires))
  else
    expires = til + SLACK - (til + SLACK) % 1000
    call('SET', key, pack('<dddd', a, b, c, expires), 'PXAT', expiry(til))
  end
end
