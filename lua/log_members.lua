-- The members of a sliding log, which all kinds of log have.

local now_text, admit, time_at

if sliding_log then
  now_text = time[2] .. ''
  now_text = time[1] .. string.rep('0', 6 - #now_text) .. now_text

  while texts do
    local window, grain = texts.window, texts.grain
    texts.header, texts.expires = (grain > 0 and '#' or '=') .. digits(window), expiry(now + window)
    if grain > 0 then
      texts.expired, texts.begin = digits(now - window), digits(now - now % grain)
    end
    texts = texts.before
  end

  -- Adds members of weight 1, and the header of a new log. A name that is there already was added in the same microsecond.
  function admit(key, count, stored, header)
    local missing
    if header then
      missing = count + 1 - call('ZADD', key, '0', header, now_text, now_text)
    else
      missing = count - call('ZADD', key, now_text, now_text)
    end
    local attempt = stored
    while missing > 0 do
      local members = {}
      for i = 1, missing do
        attempt = attempt + 1
        members[2 * i - 1], members[2 * i] = now_text, now_text .. '-' .. attempt
      end
      missing = missing - call('ZADD', key, unpack(members))
    end
  end

  -- The time of the member with this rank.
  function time_at(key, rank)
    local member = call('ZRANGE', key, rank, rank)[1]
    return tonumber(member) or tonumber(string.match(member, '^%d+')) or 0
  end
end
