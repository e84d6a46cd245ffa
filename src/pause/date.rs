/// The seconds since the Unix epoch of a date such as `Sun, 06 Nov 1994 08:49:37 GMT` (RFC 9110 §5.6.7).
///
/// The obsolete formats of that section are not read.
pub(super) fn seconds_of(date: &str) -> Option<u64> {
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let (_, date) = date.split_once(", ")?;
    let parts: Vec<&str> = date.split(' ').collect();
    let &[day, month, year, time, "GMT"] = &parts[..] else {
        return None;
    };
    let month = 1 + MONTHS.iter().position(|name| *name == month)? as u64;
    let time: Vec<&str> = time.split(':').collect();
    let &[hour, minute, second] = &time[..] else {
        return None;
    };
    let number = |digits: &str, len: usize, most: u64| {
        let number: u64 = digits.parse().ok().filter(|_| digits.len() == len)?;
        (number <= most).then_some(number)
    };
    let (day, year) = (number(day, 2, 31)?, number(year, 4, 9_999)?);
    let seconds = number(hour, 2, 23)? * 3_600 + number(minute, 2, 59)? * 60 + number(second, 2, 60)?;

    // The years of these days begin in March, so that the leap day is the last one.
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year.checked_sub(1)?, month + 9)
    };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day.checked_sub(1)?;
    Some(days.checked_sub(719_468)? * 86_400 + seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_date_is_read() {
        for (date, seconds) in [
            ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
            ("Sun, 06 Nov 1994 08:49:37 GMT", 784_111_777),
            ("Tue, 29 Feb 2000 23:59:59 GMT", 951_868_799),
            ("Wed, 01 Mar 2000 00:00:00 GMT", 951_868_800),
            ("Fri, 01 Jan 2027 00:00:00 GMT", 1_798_761_600),
            ("Mon, 01 Mar 2100 00:00:00 GMT", 4_107_542_400),
        ] {
            assert_eq!(seconds_of(date), Some(seconds), "{date}");
        }
        for wrong in [
            "",
            "30",
            "Sun, 06 Nov 1994 08:49:37",
            "Sun, 06 Nov 1994 08:49:37 CET",
            "Sunday, 06-Nov-94 08:49:37 GMT",
            "Sun, 00 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 24:49:37 GMT",
            "Sun, 06 Nov 1969 08:49:37 GMT",
            "Sun, 06 Nov 0000 08:49:37 GMT",
            "Sun, +6 Nov 1994 08:49:37 GMT x",
        ] {
            assert_eq!(seconds_of(wrong), None, "{wrong}");
        }
    }
}
