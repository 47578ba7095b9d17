// os/proc.h: API_UNAVAILABLE(macos), API_AVAILABLE(ios(13.0)).

public func os_proc_available_memory() -> Int { fatalError() }
