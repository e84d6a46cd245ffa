-- The wait of a charge that a sliding log denies, and the reset of the log.

local wait_of_log, reset_of_log

if sliding_log then
  -- How many entries the call may still read to find out how long denied charges wait.
  local reads = ALL_READS

  -- How many entries a charge may read for its wait. Most waits are for one of the first, which each charge may read.
  local function bound_of(log)
    if reads >= log.budget then
      return log.budget - 1
    end
    return math.min(log.budget - 1, math.max(8, reads))
  end

  -- The time of the entry whose expiry frees this much weight. Past the budget it is that of the last entry read.
  local function freed_at(log, need)
    local first = log.headers + log.skipped
    if log.kind == '=' or log.weight == log.stored then
      local member = call('ZRANGE', log.key, first + need - 1, first + need - 1)[1]
      return member and parts_of(member) or now
    end
    local at, read, size, bound = now, 0, 8, bound_of(log)
    while need > 0 and read < bound and log.skipped + read < log.stored do
      local upto = math.min(read + size, bound)
      for _, member in ipairs(call('ZRANGE', log.key, first + read, first + upto - 1)) do
        if need > 0 then
          local weight
          at, weight = parts_of(member)
          need = need - weight
        end
      end
      read, size = upto, size * 8
    end
    reads = reads - read
    return at
  end

  -- The time until a charge fits.
  function wait_of_log(log, cost, quota, window)
    local need = math.min(log.total + cost - quota, log.total)
    if need <= 0 then
      return window
    end
    -- One that is further ahead is of a clock that is gone.
    return math.min(math.max(1, freed_at(log, need) + window - now), window + SLACK)
  end

  -- The time until nothing counts.
  function reset_of_log(log, window)
    if log.stored <= log.gone then
      return 0
    end
    local member = call('ZRANGE', log.key, -1 - log.gone, -1 - log.gone)[1]
    return math.min(window, math.max(0, parts_of(member) + window - now))
  end
end
