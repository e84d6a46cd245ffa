-- Entries of a sliding log that are ahead of the clock: reservations, for requests that wait until then, and those that are gone,
-- which a clock that was set back has left.

-- Makes the functions that reserve, and that forget what is gone.
local function make_log_reservations(at_rank, weight_of, simplify, remove, insert, skip_older_than)
  -- Whether an entry is a reservation that was made until then.
  local function is_reserved_until(member, latest)
    local made = string.match(member, '@(%d+)')
    return made and tonumber(made) <= latest
  end

  -- Adds weight that is admitted at its turn.
  local function reserve(log, turn, weight)
    log.kind, log.weight = '@', log.weight + weight
    insert(log, turn, '@', now, weight)
  end

  -- Removes what a clock that is gone has left after `ahead`, newest first, without the reservations of this clock.
  local function remove_gone_beside_reservations(log, ahead)
    -- Where both ends belong to this clock, none is looked for between them: a long queue would be read each time.
    local after = '(' .. digits(ahead)
    local lowest = call('ZRANGEBYSCORE', log.key, after, '+inf', 'LIMIT', '0', '1')[1]
    if is_reserved_until(lowest, ahead) and is_reserved_until(at_rank(log, -1), ahead) then
      log.gone = 0
      return
    end
    local members = call('ZREVRANGEBYSCORE', log.key, '+inf', after, 'LIMIT', '0', log.budget - 2)
    local removed, weight = {}, 0
    for _, member in ipairs(members) do
      if not is_reserved_until(member, ahead) then
        local _, one = parts_of(member)
        removed[#removed + 1], weight = member, weight + one
      end
    end
    log.gone = #removed == #members and log.gone - #removed or 0
    if #removed > 0 then
      call('ZINCRBY', log.key, weight, log.header)
      call('ZREM', log.key, unpack(removed))
    end
    log.budget, log.stored = log.budget - #members, log.stored - #removed
    log.weight, log.total = log.weight - weight, log.total - weight
  end

  -- Subtracts those that are gone from the total.
  local function skip_gone(log)
    local count, last = math.min(log.gone, log.budget - 2), log.headers + log.stored - 1
    if log.kind == '=' then
      log.total = log.total - log.gone
    elseif log.kind == '#' then
      log.total, log.budget = log.total - weight_of(log, last - count + 1, last), log.budget - count
    else
      -- Beside reservations they count until a check removes them.
      log.gone = 0
    end
  end

  -- Removes those that are gone, newest first.
  local function remove_gone(log)
    local count = math.max(0, math.min(log.gone, log.budget - 2))
    if count > 0 then
      log.total = log.total - remove(log, log.headers + log.stored - count, count)
      log.gone = log.gone - count
    end
  end

  -- Removes those that are gone for a charge that is denied, or does not count them for one that only reads.
  local function forget(log, window, exact)
    if operation == 'peek' then
      return skip_gone(log)
    elseif log.kind == '@' then
      remove_gone_beside_reservations(log, now + math.min(SLACK, log.longest))
    else
      remove_gone(log)
    end
    simplify(log, exact)
    if log.kind == '=' and log.gone > 0 then
      log.total = log.weight
      skip_older_than(log, window)
      log.total = log.total - log.gone
    end
  end

  return { reserve = reserve, forget = forget }
end
