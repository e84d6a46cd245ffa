-- The longer windows under which the entries of a sliding log were stored, which few logs have.

-- Makes the functions that read and write the windows of a log.
local function make_log_windows(at_rank, describe)
  -- Finds the longest window that is needed, and removes those that are not.
  local function expire(log)
    for i = #log.longer, 1, -1 do
      local longer, til, name = unpack(log.longer[i])
      if til > now then
        log.longest = math.max(log.longest, longer)
      elseif operation ~= 'peek' then
        call('ZREM', log.key, name)
        table.remove(log.longer, i)
        log.headers = log.headers - 1
        describe(log)
      end
    end
  end

  -- The windows with the times until which they are needed, longest first, with that of an entry added at this time.
  local function needed_of(log, window, at)
    local others, own = { unpack(log.longer) }, { window, at + window }
    if log.stored > 0 then
      others[#others + 1] = { log.window, parts_of(at_rank(log, -1)) + log.window }
    end
    local all = { own }
    for _, other in ipairs(others) do
      if other[1] == window then
        own[2] = math.max(own[2], other[2])
      else
        all[#all + 1] = other
      end
    end
    table.sort(all, function(a, b)
      return a[1] > b[1]
    end)
    -- Each is needed that is the longest at some time, and that of this entry.
    local needed, latest = {}, now
    for _, one in ipairs(all) do
      if one[2] > latest or one == own then
        needed[#needed + 1] = one
      end
      latest = math.max(latest, one[2])
    end
    return needed
  end

  -- Stores the window of an entry that is added at this time, which is not the shortest.
  local function store(log, window, at)
    local needed = needed_of(log, window, at)
    log.window = table.remove(needed)[1]
    while #needed > LONGER_WINDOWS do
      needed[1][2] = math.max(needed[1][2], table.remove(needed, 2)[2])
    end

    local left = {}
    for _, longer in ipairs(needed) do
      longer[3] = '>' .. digits(longer[1])
      call('ZADD', log.key, -longer[2], longer[3])
      left[longer[3]] = true
    end
    for _, longer in ipairs(log.longer) do
      if not left[longer[3]] then
        call('ZREM', log.key, longer[3])
      end
    end
    log.headers = log.headers - #log.longer + #needed
    log.longer = needed
  end

  return { expire = expire, store = store }
end
