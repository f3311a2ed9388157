-- Waiters. A waiter registers what it waits for, in the same step that finds it missing; the transition that
-- fulfils it takes the registration away and pushes one token, on which the waiter's connection sleeps.

local WAKE_TTL_MS = 600000  -- tokens of a waiter that died

local function fulfilled(t, interests)
  for k = 1, #interests, 3 do
    local stage, rows, settled = interests[k], interests[k + 1], interests[k + 2]
    if stage == 0 then
      if state(t, 'live') + rows <= t.config.capacity then return true end
    else
      if state(t, 'r' .. stage) >= rows then return true end
      if settled == 1 and state(t, 'w' .. stage) == 0 then return true end
    end
  end
  return false
end

local function wake(t)
  local waiters = t.prefix .. KEY.waiters
  if redis.call('HLEN', waiters) == 0 then return end
  local all, now = redis.call('HGETALL', waiters), now_ms()
  for k = 1, #all, 2 do
    local record = cmsgpack.unpack(all[k + 1])
    if record[1] < now then
      redis.call('HDEL', waiters, all[k])
    elseif fulfilled(t, record[4]) then
      redis.call('HDEL', waiters, all[k])
      redis.call('RPUSH', t.prefix .. KEY.wake .. all[k], '1')
      redis.call('PEXPIRE', t.prefix .. KEY.wake .. all[k], WAKE_TTL_MS)
    end
  end
end

-- Writes everything that a call changed, in one place: chunks, counters, wake tokens.
local function commit(t)
  for _, chunk in ipairs(t.order) do
    if next(chunk.before) ~= nil and not free_if_over(t, chunk) then save_chunk(t, chunk) end
  end
  local changed = false
  for field, by in pairs(t.delta) do
    if by ~= 0 then
      redis.call('HINCRBY', t.prefix .. KEY.state, field, by)
      changed = true
    end
  end
  for label, rows in pairs(t.ended) do redis.call('HINCRBY', t.prefix .. KEY.ended, label, rows) end
  if changed then wake(t) end
end
