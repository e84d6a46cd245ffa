-- Sliding window log: a sorted set with a member for each admission, scored with its time.
--
-- The member `=<window>`, whose score is 0, is there while all others weigh 1 and were stored under this window: then they are
-- counted. It stays when they have expired, since a key that is deleted cannot be created again on a node from which its slot
-- is moving. `lua/weighted_log.lua` decides all other logs, and long ones of which a charge may have to remove more than its
-- budget: what has expired, or is ahead of the clock.

if sliding_log then
  -- Decides a charge of 1 for each of a few callers, without a precision.
  function sliding_log(key, times, rest, cost, quota, window, grain, text, request)
    local is_plain = cost == 1 and grain == 0 and times <= FEW and operation ~= 'refund'
    local stored = is_plain and (lone_rank or call('ZREVRANK', key, text.header))
    local members = is_plain and (stored and stored + 1 or lone_size or call('ZCARD', key))
    local ahead, removed, skipped = now + (window < SLACK and window or SLACK), 0, 0
    if stored then
      text.expired = text.expired or digits(now - window)
      if stored > BUDGET - 2 and (call('ZCOUNT', key, '(0', text.expired) > BUDGET - 2 or time_at(key, '-1') > ahead) then
        return weighted_log(key, times, rest, cost, quota, window, grain, text, request, members)
      end
      -- 1. Remove what has expired. A peek skips it.
      if operation == 'peek' then
        skipped = call('ZCOUNT', key, '(0', text.expired)
      else
        removed = call('ZREMRANGEBYSCORE', key, '(0', text.expired)
      end
    elseif members ~= 0 then
      return weighted_log(key, times, rest, cost, quota, window, grain, text, request, members)
    end
    -- 2. Count.
    local total = (stored or 0) - removed - skipped
    -- 3. Compare with the limit.
    local room, newest = math.max(0, quota - total), nil
    local counted, waits = math.min(times, room), room < times
    if waits then
      newest = total > 0 and time_at(key, '-1')
      if newest and (operation == 'charge' or newest > ahead) then
        return weighted_log(key, times, rest, cost, quota, window, grain, text, request, members - removed)
      end
    end
    if rest then
      counted, waits = rest(request, room, counted, cost, quota)
    end
    if counted > 0 then
      -- 4. Add.
      admit(key, counted, total, members == 0 and text.header)
      -- 5. Set the expiry.
      call('PEXPIREAT', key, text.expires)
      total, room, newest = total + counted, math.max(0, room - counted), now
    end

    -- The wait of a denied charge, until as many have expired as it lacks; and the time until all have.
    local wait, need = waits and window or 0, math.min(total + 1 - quota, total)
    if waits and need > 0 then
      keep(key, now + window)
      wait = math.max(1, time_at(key, skipped + need) + window - now)
    end
    newest = newest or total > 0 and time_at(key, '-1')
    return counted, room, wait, newest and math.max(0, math.min(window, newest + window - now)) or 0
  end
end
