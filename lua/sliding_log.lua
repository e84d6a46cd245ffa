-- Sliding window log: a sorted set with a member for each admission, scored with its time. A charge fits while the window has
-- room for it.
--
-- The member `=<window>`, whose score is 0, is there while all others weigh 1 and were stored under this window: then they are
-- counted. It stays when they have expired, since a key that is deleted cannot be created again on a node from which its slot
-- is moving. `lua/weighted_log.lua` has all that is not so plain.

if algorithm == 'log' then
  if not log then
    -- Adds members of weight 1. A name that is there already was added in the same microsecond.
    function admit(key, count, stored)
      local missing, attempt = count - call('ZADD', key, now_text, now_text), stored
      while missing > 0 do
        local members = {}
        for i = 1, missing do
          attempt = attempt + 1
          members[2 * i - 1], members[2 * i] = now_text, now_text .. '-' .. attempt
        end
        missing = missing - call('ZADD', key, unpack(members))
      end
    end

    local function time_of(member)
      return tonumber(member) or tonumber(string.match(member, '^%d+')) or 0
    end

    function log(key, times, rest, cost, quota, window, grain, text, reserve)
      local few = times <= FEW
      local plain, stored, late = few and call('ZSCORE', key, text.header), few and call('ZCARD', key), 0
      if not few or not plain and stored > 0 then
        return (weighted or make_weighted())(key, times, rest, cost, quota, window, grain, text, reserve, stored)
      end

      -- Removes what has expired, a part of it if there is much.
      local removed = 0
      if plain then
        stored = stored - 1
        text.expired = text.expired or string.format('%.0f', now - window)
        if stored < BUDGET and operation ~= 'peek' then
          removed = call('ZREMRANGEBYSCORE', key, '(0', text.expired)
        else
          late = call('ZCOUNT', key, '(0', text.expired)
          removed = operation ~= 'peek' and math.min(late, BUDGET - 2) or 0
          if removed > 0 then
            call('ZREMRANGEBYRANK', key, '1', removed)
          end
          late = late - removed
        end
        stored = stored - removed
      end

      -- Counts, and compares with the limit.
      local room, counted, newest = math.max(0, quota - stored + late), times, nil
      if room < times then
        newest = stored > 0 and time_of(call('ZRANGE', key, '-1', '-1')[1])
        if newest and (operation == 'charge' or newest > now + math.min(SLACK, window)) then
          return (weighted or make_weighted())(
            key, times, rest, cost, quota, window, grain, text, reserve, stored + 1, removed
          )
        end
        counted = room
      end
      local waits = counted < times
      if rest then
        counted, waits = rest(room, counted, cost, quota)
      end

      -- Adds, and sets the expiry.
      if counted > 0 then
        if not plain then
          call('ZADD', key, '0', text.header)
        end
        admit(key, counted, stored)
        text.expires = text.expires or expiry(now + window)
        call('PEXPIREAT', key, text.expires)
        stored, room = stored + counted, math.max(0, room - counted)
        if not waits then
          return counted, room, 0, window
        end
      end

      -- The wait of a denied charge, until as many members have expired as it lacks.
      local wait = 0
      if waits then
        local total = stored - late
        local need = math.min(total + 1 - quota, total)
        wait = window
        if need > 0 then
          local rank = late + need
          wait = math.max(1, time_of(call('ZRANGE', key, rank, rank)[1]) + window - now)
          keep(key, now + window)
        end
      end
      local reset = window
      if counted == 0 then
        newest = newest or stored > late and time_of(call('ZRANGE', key, '-1', '-1')[1])
        reset = newest and math.max(0, math.min(window, newest + window - now)) or 0
      end
      return counted, room, wait, reset
    end
  end

  -- What is written as text is so once for all requests of the run.
  local digits = string.format('%.0f', x)
  z = { digits = digits, header = '=' .. digits }
  rule = log
  if y > 0 or cost > 1 or operation == 'reserve' or operation == 'refund' then
    rule = weighted or make_weighted()
  end
end
