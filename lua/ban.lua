-- Bans: since when denials of the next charge are counted, and how many there are; until when the last ban lasts; and its
-- level, the number of times that the next one is doubled. Denials and level are one number. Without denials, the first number
-- is the time when the last ban began.
--
-- A ban depends on what is decided about another charge, which is in the reply: it has a wait if it is one that denies.

if algorithm == 'ban' then
  if not ban then
    function ban(key, times, rest, cost, quota, window, first, longest)
      local since, packed, til, expires = fetch(key)
      local level = packed % LEVELS
      local denials = (packed - level) / LEVELS
      if since > now and since > now + math.min(SLACK, window) then
        -- The clock was set back. A ban that ends within the longest one stays, whichever policy has begun it.
        denials = 0
        if til > now + longest then
          since, til, level = 0, 0, 0
        end
      elseif denials > 0 and since + window <= now then
        denials = 0
      end
      local in_force = til > now
      banned = banned or in_force

      -- The next charge that is not a marker.
      local guarded, place = following, at + 1
      while guarded and guarded[C_FINDS] == marker do
        guarded, place = guarded[C_NEXT], place + 1
      end
      rest(0, in_force and operation ~= 'renew' and 0 or times, cost)
      local denies = false
      local watches = (operation == 'check' or reserve) and not banned and quota < NEVER
      if watches and guarded and guarded[C_RULE] ~= ban and guarded[C_COST] <= guarded[C_QUOTA] then
        local _, _, wait = unpack_numbers('<dddd', reply[place + 1])
        denies = wait > 0
      end

      local blocks = operation == 'charge' and now + math.min(cost, longest) > til
      if (denies or blocks) and til <= now then
        -- One step less for each window without a ban.
        local span = now - til
        local decayed = math.max(0, level - (span - span % window) / window)
        if denies then
          denials = denials + 1
          if denials == 1 then
            since = now
          end
          if denials >= quota then
            local length = math.min(longest, first * 2 ^ decayed)
            since, til, denials = now, now + length, 0
            level = length < longest and decayed + 1 or decayed
          end
        else
          level = decayed
        end
      end
      if blocks then
        since, til, denials = now, now + math.min(cost, longest), 0
      end

      local forgotten = til + level * window
      if denials > 0 and since + window > forgotten then
        forgotten = since + window
      end
      if denies or operation == 'charge' then
        write(key, since, denials * LEVELS + level, til, expires, forgotten)
      elseif in_force then
        keep(key, forgotten)
      end
      local reset = forgotten > now and forgotten - now or 0
      if til <= now then
        return 0, math.max(1, quota - denials), 0, reset
      end
      return 0, 0, (operation == 'check' or operation == 'peek' or reserve) and til - now or 0, reset
    end
  end
  rule = ban
end
